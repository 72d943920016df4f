"""What each drafter could bring one request at most on the very machine that this runs on, against the best mode there
is today.
"""
