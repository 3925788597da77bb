"""semifed.engines"""
