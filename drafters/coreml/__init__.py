"""Drafting with Core ML: a converter without torch, Core ML's runtime, and the drafter on top of it.

A *package* is a directory: `model.mlpackage` (one function per row count, one set of weights), `embedding.npy`,
`rope.npy`, `expected.npy` and `manifest.json`. Its graphs hold no positions and no tree: the host supplies embedded
tokens, rotations, a mask and the cache. So branches, ragged lengths and rollback are only data. See docs/coreml.md.

Modules, each importing only those before it: `layout`, `package` (what is on disk); `weights`, `converter` (make it);
`runtimes`, `drafter` (run it, draft and read with it); `trial`, `selection` (on which unit it runs here);
`doctor` (the program behind `outrider doctor`).
"""
