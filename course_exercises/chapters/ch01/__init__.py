"""The checks of chapter 01: a line that delivers, a line that stalls, and six decisions."""
