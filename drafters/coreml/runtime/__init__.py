"""What runs a package: Core ML on a Mac, an interpreter in numpy anywhere else."""
