"""Runs a complete task with independent programs that use the server's APIs, and checks their results.

Installs nothing: it runs the programs that it finds in a folder, and uses the server by its URL only.
"""
