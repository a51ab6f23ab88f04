"""Whole models and files: models made of files, and files made of models, shard by shard."""
