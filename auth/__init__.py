"""Who is calling: keys, principals, their store."""
