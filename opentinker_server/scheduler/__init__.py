"""Order and identity of operations: nothing acknowledged is done twice, and one adapter's work stays in order."""
