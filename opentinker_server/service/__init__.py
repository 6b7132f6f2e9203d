"""What calls mean: validation, sessions, adapters, snapshots, samplers, artifacts."""
