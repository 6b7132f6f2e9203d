"""What the tests of cases share: small datums, the optimizer that shows gradients, exported weights."""
