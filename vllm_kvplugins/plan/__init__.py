"""Residency plans: which blocks are resident after which token count.

Plans are computed from token counts alone. Imports neither policies nor torch.
"""
