"""Context at several resolutions: spans cut at surprising tokens (SeKV).

``segmentation`` says which tokens stay and which make up spans, ``coarse`` what a
span is as a whole, ``factors`` how its tokens lie in host memory.
"""
