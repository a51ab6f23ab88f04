"""Programs as they run, and what lives from one to the next: buckets that stay whole, gradients that are held."""
