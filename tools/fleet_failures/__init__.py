"""A fleet of fake hosts on this machine whose parts are killed under readers, and what its ingress costs them."""
