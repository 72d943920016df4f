"""The machine below: worker processes, cores and the BLAS they use."""
