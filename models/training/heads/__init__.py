"""How heads that read a target are made: its text, its rows, what each kind of head learns of them, public layouts.

Training only; its modules but `recipe` and `record` need PyTorch.
"""
