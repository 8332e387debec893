"""Trained SeKV routers: they predict which spans a query attends to.

``router`` computes gates while serving, ``files`` reads and writes router files.
``vllm_kvplugins.training`` makes routers.
"""
