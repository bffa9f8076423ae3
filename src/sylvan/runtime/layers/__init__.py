"""Building blocks of models; sharding, quantisation and fusion live here."""
