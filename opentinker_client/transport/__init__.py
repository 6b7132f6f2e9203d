"""The connection to a server: one background event loop, one channel, one retry policy."""
