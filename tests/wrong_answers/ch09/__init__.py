"""Wrong and other right answers to the exercises of chapter 09."""
