"""Two hosts on one machine: network namespaces with a link between them that is as slow and lossy as asked."""
