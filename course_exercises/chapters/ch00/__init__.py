"""The checks of chapter 00: the average of all ranks, the size of a message, passing it on."""
