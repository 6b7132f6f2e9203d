"""The `opentinker` command."""
