"""What a chapter draws, one module a chapter."""
