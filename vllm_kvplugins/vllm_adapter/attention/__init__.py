"""Attention backends over the flat page view, one file per platform kernel."""
