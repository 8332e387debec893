"""Sessions: the cache of a request, kept for the request that continues it.

::

    scheduler: SessionDirectory                        worker: SessionStore
      request ends            ──────────── Save ──────>  copy pages to host memory
      prompt continues it     ──────────── Load ──────>  copy pages into the pool
      no room, too old        ─────── drop, unlink ───>  delete, or leave the file
      session only in a file  ──────────── stage ─────>  read the file
                              <───────── SessionAck ───
    restart: SessionFolder.scan finds the files again
    replicas: ReplicaSessions finds files of others ─> SessionDirectory.add_stored

The directory decides and counts, without tensors. The store holds the bytes and
executes commands. Files lie in a ``SessionStorage``: a directory or an object store.
"""
