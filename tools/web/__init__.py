"""The HTTP server from outside: started before a cluster, asked as strangers ask, watched as the system sees it."""
