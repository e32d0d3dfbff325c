"""What the answers of chapter 12 share."""

GB = 1e9
