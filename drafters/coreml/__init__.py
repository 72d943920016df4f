"""Drafting with CoreML: a converter without torch, two runtimes for what it writes, and the drafter on top of them.

A *package* is a directory: `model.mlpackage` (one function per row count, one set of weights), `embedding.npy`,
`rope.npy` and `manifest.json`. Its graphs hold no positions and no tree: the host supplies embedded tokens, rotations,
a mask and, by mode, the cache. So branches, ragged lengths and rollback are data. See docs/coreml.md.

Modules, each importing only those before it: `layout`, `saved`, `package` (what is on disk); `weights`, `graph`,
`converter` (make it); `runtimes`, `interpreter` (run it); `host` (feeds it); `trial`, `selection` (which
package works here, and on which unit); `drafter` (drafts with it), `prompts` (reads prompts, where that is quicker);
`convert`, `doctor` (the programs behind `outrider convert` and `outrider doctor`).
"""
