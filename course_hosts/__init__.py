"""Ranks on several hosts, nodes that die, replicas: README.md lists the files."""
