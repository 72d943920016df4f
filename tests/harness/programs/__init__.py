"""Independent programs that speak these APIs, each held to a whole task at a running server.

Nothing is installed here: what is found in a folder is run. Knows the programs' command lines; knows the server by its
URL only.
"""
