"""The pictures of the chapters that are about plans."""
