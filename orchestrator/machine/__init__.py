"""The machine: worker processes, the cores they run on and the BLAS they use."""
