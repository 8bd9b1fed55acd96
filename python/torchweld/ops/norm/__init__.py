"""Layer and RMS norm."""
