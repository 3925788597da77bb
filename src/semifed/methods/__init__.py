"""semifed.methods"""
