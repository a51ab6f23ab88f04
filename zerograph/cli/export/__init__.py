"""Files that other tools open, made from a plan file: one module per format. No torch in here."""
