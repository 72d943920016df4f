"""Drafting with CoreML: a converter without torch, two runtimes for what it writes, and the drafter on top of them.

A *package* is a directory: `model.mlpackage` (one function per row count, one set of weights), `embedding.npy`,
`rope.npy` and `manifest.json`. Its graphs hold no positions and no tree: the host supplies embedded tokens, rotations,
a mask and, by mode, the cache. So branches, ragged lengths and rollback are data. See docs/coreml.md.

Rooms, each knowing only those before it: `package/` (what is on disk), `converter/` (makes it), `runtime/` (runs it),
`host/` (feeds it and drafts), `trials/` (which one works here and what it costs).
"""
