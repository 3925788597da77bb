"""semifed.data"""
