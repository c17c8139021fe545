"""Tables: columns, schemas, preprocessing that sites agree on."""
