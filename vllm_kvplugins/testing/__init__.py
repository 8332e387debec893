"""Checks that policy authors run against their own policies."""
