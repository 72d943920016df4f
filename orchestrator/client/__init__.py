"""What a program that asks uses: clients, results, and a cluster of its own."""
