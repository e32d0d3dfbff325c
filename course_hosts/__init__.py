"""Ranks on several hosts, nodes that die, groups that grow: README.md lists the files."""
