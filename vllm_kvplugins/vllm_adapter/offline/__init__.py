"""Engines without a server, for ``kvplugins explain`` and ``kvplugins record``."""
