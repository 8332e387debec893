"""Engines without a server, for the command line: ``explain`` and ``record``."""
