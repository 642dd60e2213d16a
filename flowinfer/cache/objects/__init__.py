"""The object tier: a KV block an object, in S3 or what is like it. Its names tell class, retention and tenant."""
