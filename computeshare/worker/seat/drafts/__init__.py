"""Reading a version's parts before its commit."""
