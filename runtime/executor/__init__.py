"""Programs as they run, and what lives from one to the next: buckets that stay resident, gradients that are held."""
