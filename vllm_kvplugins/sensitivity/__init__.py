"""How sensitive each layer of a model is to block-wise prefill (EpiCache).

``profile`` reads, writes and finds profiles and needs no torch; ``measure`` makes
them with a transformers model.
"""
