"""What other projects' tests and the APIs' own references ask of a server, told again and asked of this one.

Each case says where it is from and what is expected there; what came of it is found by asking, never written down by
hand. Knows HTTP only; nothing here knows how the server works.
"""
