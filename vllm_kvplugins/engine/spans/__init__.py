"""Spans at two resolutions: means next to the pages, tokens reconstructed on demand."""
