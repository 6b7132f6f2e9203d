"""What outlives the process: the database (metadata only), artifact files, names and URIs."""
