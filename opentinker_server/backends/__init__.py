"""How the control plane starts device workers and talks to them."""
