"""Controllers: ``aici/runtime/`` is the process that runs their Wasm, ``aici/controllers/`` are those that come with uma-trio."""
