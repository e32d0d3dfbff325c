"""The figures that one chapter draws: a file for each chapter."""
