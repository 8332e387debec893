"""Engines without a server, for ``kvplugins explain`` and ``research record``."""
