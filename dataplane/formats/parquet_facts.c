/*
 * The footer of a Parquet file, from Thrift's compact protocol into tables of numbers, in one pass.
 * parquet_footers.py describes the tables. tests/oracles makes the same ones in Python, and refuses
 * the same footers.
 *
 * The bytes are untrusted. Each read is checked against their end, nesting has a limit, every value
 * takes at least one byte, so that work is linear in them, and nothing is allocated here.
 */

#include <stddef.h>
#include <stdint.h>

#include "parquet_facts.h"

enum {
    DEPTH_MAX = 48,
    VARINT_BITS_MAX = 64,
    ELEMENT_NUMBERS = 4, /* type, length, repetition, children */
    GROUP_NUMBERS = 2,   /* rows, columns */
    COLUMN_NUMBERS = 9   /* flags, then as below */
};

enum kind { TRUE_KIND = 1, FALSE_KIND, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT,
            UUID };

enum fault { FINE, CUT_OFF, TOO_DEEP, TWICE, OTHER_TYPE, TOO_LONG, NO_VARINT, NO_KIND, MISSING,
             NO_ROOM };

/* Flags of a column: the fields that are present. */
enum { OTHER_FILE = 1, METADATA = 2, ENCRYPTED = 4, VALUES = 8, DECODED_BYTES = 16, BYTES = 32,
       FIRST_PAGE = 64 };

/* The numbers of a column. */
enum { AT_FLAGS, AT_VALUES, AT_DECODED_BYTES, AT_BYTES, AT_FIRST_PAGE, AT_DICTIONARY, AT_LONGEST,
       AT_NULLS, AT_LEVELS };

struct table {
    int64_t *rows; /* NULL: rows are only counted */
    int64_t count, room;
};

struct reader {
    const uint8_t *begin, *at, *end;
    struct table elements, groups, columns, levels;
    int64_t rows;
    int is_encrypted;
    enum fault fault;
    int64_t field; /* the fault's field */
};

struct field {
    int64_t id;
    int kind;
    uint32_t seen; /* kept fields that occurred, by id, all below 32 */
};

static int refuse(struct reader *reader, enum fault fault, int64_t field)
{
    if (!reader->fault) {
        reader->fault = fault;
        reader->field = field;
    }
    return 0;
}

static int read_byte(struct reader *reader, uint8_t *byte)
{
    if (reader->at >= reader->end)
        return refuse(reader, CUT_OFF, 0);
    *byte = *reader->at++;
    return 1;
}

static int read_varint(struct reader *reader, uint64_t *number)
{
    uint64_t found = 0;
    for (int shift = 0; shift < VARINT_BITS_MAX; shift += 7) {
        uint8_t byte;
        if (!read_byte(reader, &byte))
            return 0;
        if (shift == 63 && (byte & 127) > 1)
            return refuse(reader, NO_VARINT, 0);
        found |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            *number = found;
            return 1;
        }
    }
    return refuse(reader, NO_VARINT, 0);
}

static int64_t unfolded(uint64_t number)
{
    return (int64_t)((number >> 1) ^ (0 - (number & 1)));
}

static int skip_bytes(struct reader *reader, uint64_t length)
{
    if (length > (uint64_t)(reader->end - reader->at))
        return refuse(reader, TOO_LONG, 0);
    reader->at += length;
    return 1;
}

static int check_depth(struct reader *reader, int depth)
{
    return depth <= DEPTH_MAX || refuse(reader, TOO_DEEP, 0);
}

/* The next field of a struct; 0 at the end of the struct, or if nothing more can be read. */
static int next_field(struct reader *reader, struct field *field)
{
    uint8_t head;
    uint64_t number;
    if (!read_byte(reader, &head) || head == 0)
        return 0;
    field->kind = head & 15;
    if (head > 15)
        field->id = (int64_t)((uint64_t)field->id + (head >> 4));
    else if (read_varint(reader, &number))
        field->id = unfolded(number);
    else
        return 0;
    return 1;
}

/* Whether a kept field occurs for the first time. No kept field is a boolean. */
static int is_new(struct reader *reader, struct field *field)
{
    uint32_t bit = (uint32_t)1 << field->id;
    if (field->seen & bit)
        return refuse(reader, TWICE, field->id);
    field->seen |= bit;
    return field->kind > FALSE_KIND || refuse(reader, OTHER_TYPE, field->id);
}

static int skip_value(struct reader *reader, int kind, int depth);

static int skip_struct(struct reader *reader, int depth)
{
    struct field field = {0};
    if (!check_depth(reader, depth))
        return 0;
    while (next_field(reader, &field))
        if (field.kind > FALSE_KIND && !skip_value(reader, field.kind, depth))
            return 0;
    return !reader->fault;
}

/* The number and the kind of a list's values: the caller reads all of them next. */
static int open_list(struct reader *reader, int depth, uint64_t *count, int *kind)
{
    uint8_t head;
    if (!read_byte(reader, &head))
        return 0;
    *count = head >> 4;
    *kind = head & 15;
    if (*count == 15 && !read_varint(reader, count))
        return 0;
    if (*count > (uint64_t)(reader->end - reader->at))
        return refuse(reader, TOO_LONG, 0);
    return check_depth(reader, depth);
}

static int skip_list(struct reader *reader, int depth)
{
    uint64_t count;
    int kind;
    if (!open_list(reader, depth, &count, &kind))
        return 0;
    for (; count > 0; count--)
        if (!skip_value(reader, kind, depth + 1))
            return 0;
    return 1;
}

static int skip_map(struct reader *reader, int depth)
{
    uint64_t count;
    uint8_t kinds = 0;
    if (!read_varint(reader, &count))
        return 0;
    if (count > (uint64_t)(reader->end - reader->at))
        return refuse(reader, TOO_LONG, 0);
    if (!check_depth(reader, depth))
        return 0;
    if (count && !read_byte(reader, &kinds))
        return 0;
    for (; count > 0; count--)
        if (!skip_value(reader, kinds >> 4, depth + 1)
            || !skip_value(reader, kinds & 15, depth + 1))
            return 0;
    return 1;
}

static int skip_value(struct reader *reader, int kind, int depth)
{
    uint64_t number;
    uint8_t byte;
    switch (kind) {
    case TRUE_KIND:
    case FALSE_KIND:
    case BYTE:
        return read_byte(reader, &byte);
    case I16:
    case I32:
    case I64:
        return read_varint(reader, &number);
    case DOUBLE:
        return skip_bytes(reader, 8);
    case UUID:
        return skip_bytes(reader, 16);
    case BINARY:
        return read_varint(reader, &number) && skip_bytes(reader, number);
    case LIST:
    case SET:
        return skip_list(reader, depth);
    case MAP:
        return skip_map(reader, depth);
    case STRUCT:
        return skip_struct(reader, depth + 1);
    default:
        return refuse(reader, NO_KIND, kind);
    }
}

/* Skips a field that is not kept. In a struct, a boolean is its kind and takes no further byte. */
static int skip_field(struct reader *reader, const struct field *field, int depth)
{
    return field->kind <= FALSE_KIND || skip_value(reader, field->kind, depth);
}

static int read_whole(struct reader *reader, int kind, int64_t *found, int64_t field)
{
    uint64_t number;
    uint8_t byte;
    if (kind >= I16 && kind <= I64) {
        if (!read_varint(reader, &number))
            return 0;
        *found = unfolded(number);
        return 1;
    }
    if (kind < TRUE_KIND || kind > BYTE)
        return refuse(reader, OTHER_TYPE, field);
    if (!read_byte(reader, &byte))
        return 0;
    *found = byte;
    return 1;
}

static int read_number(struct reader *reader, struct field *field, int64_t *found)
{
    return is_new(reader, field) && read_whole(reader, field->kind, found, field->id);
}

/* The length of a text, which is skipped. */
static int read_length(struct reader *reader, struct field *field, int64_t *length)
{
    uint64_t number;
    if (!is_new(reader, field))
        return 0;
    if (field->kind != BINARY)
        return refuse(reader, OTHER_TYPE, field->id);
    if (!read_varint(reader, &number) || !skip_bytes(reader, number))
        return 0;
    *length = (int64_t)number;
    return 1;
}

/* Ready to read a struct inside this one. */
static int open_struct(struct reader *reader, struct field *field, int depth)
{
    if (!is_new(reader, field))
        return 0;
    if (field->kind != STRUCT)
        return refuse(reader, OTHER_TYPE, field->id);
    return check_depth(reader, depth);
}

/* Room for the next row of a table; `*row` is NULL if rows are only counted. */
static int add_row(struct reader *reader, struct table *table, int width, int64_t **row)
{
    *row = NULL;
    if (table->rows) {
        if (table->count >= table->room)
            return refuse(reader, NO_ROOM, 0);
        *row = table->rows + table->count * width;
    }
    table->count++;
    return 1;
}

static void put_row(int64_t *row, const int64_t *numbers, int width)
{
    if (row)
        for (int i = 0; i < width; i++)
            row[i] = numbers[i];
}

static int read_element(struct reader *reader, int depth)
{
    int64_t numbers[ELEMENT_NUMBERS] = {-1, 0, 0, 0}, *row;
    struct field field = {0};
    if (!check_depth(reader, depth) || !add_row(reader, &reader->elements, ELEMENT_NUMBERS, &row))
        return 0;
    while (next_field(reader, &field)) {
        int ok;
        switch (field.id) {
        case 1:
        case 2:
        case 3:
            ok = read_number(reader, &field, numbers + field.id - 1);
            break;
        case 5:
            ok = read_number(reader, &field, numbers + 3);
            break;
        default:
            ok = skip_field(reader, &field, depth);
        }
        if (!ok)
            return 0;
    }
    put_row(row, numbers, ELEMENT_NUMBERS);
    return !reader->fault;
}

/* Statistics: the length of the longest bound, and the null count. */
static int read_statistics(struct reader *reader, int64_t *numbers, int depth)
{
    struct field field = {0};
    while (next_field(reader, &field)) {
        int64_t length = 0;
        int ok;
        switch (field.id) {
        case 1:
        case 2:
        case 5:
        case 6:
            ok = read_length(reader, &field, &length);
            break;
        case 3:
            ok = read_number(reader, &field, numbers + AT_NULLS);
            break;
        default:
            ok = skip_field(reader, &field, depth);
        }
        if (!ok)
            return 0;
        if (length > numbers[AT_LONGEST])
            numbers[AT_LONGEST] = length;
    }
    return !reader->fault;
}

/* SizeStatistics: the histogram of definition levels. */
static int read_sizes(struct reader *reader, int64_t *numbers, int depth)
{
    struct field field = {0};
    while (next_field(reader, &field)) {
        uint64_t count;
        int kind;
        if (field.id != 3) {
            if (!skip_field(reader, &field, depth))
                return 0;
            continue;
        }
        if (!is_new(reader, &field))
            return 0;
        if (field.kind != LIST && field.kind != SET)
            return refuse(reader, OTHER_TYPE, field.id);
        if (!open_list(reader, depth, &count, &kind))
            return 0;
        numbers[AT_LEVELS] = (int64_t)count;
        for (; count > 0; count--) {
            int64_t level, *row;
            if (!read_whole(reader, kind, &level, field.id)
                || !add_row(reader, &reader->levels, 1, &row))
                return 0;
            put_row(row, &level, 1);
        }
    }
    return !reader->fault;
}

static int read_metadata(struct reader *reader, int64_t *numbers, int depth)
{
    struct field field = {0};
    while (next_field(reader, &field)) {
        int ok;
        switch (field.id) {
        case 5:
            ok = read_number(reader, &field, numbers + AT_VALUES);
            numbers[AT_FLAGS] |= VALUES;
            break;
        case 6:
            ok = read_number(reader, &field, numbers + AT_DECODED_BYTES);
            numbers[AT_FLAGS] |= DECODED_BYTES;
            break;
        case 7:
            ok = read_number(reader, &field, numbers + AT_BYTES);
            numbers[AT_FLAGS] |= BYTES;
            break;
        case 9:
            ok = read_number(reader, &field, numbers + AT_FIRST_PAGE);
            numbers[AT_FLAGS] |= FIRST_PAGE;
            break;
        case 11:
            ok = read_number(reader, &field, numbers + AT_DICTIONARY);
            break;
        case 12:
            ok = open_struct(reader, &field, depth + 1)
                 && read_statistics(reader, numbers, depth + 1);
            break;
        case 16:
            ok = open_struct(reader, &field, depth + 1) && read_sizes(reader, numbers, depth + 1);
            break;
        default:
            ok = skip_field(reader, &field, depth);
        }
        if (!ok)
            return 0;
    }
    return !reader->fault;
}

static int read_column(struct reader *reader, int depth)
{
    int64_t numbers[COLUMN_NUMBERS] = {0}, length = 0, *row;
    struct field field = {0};
    numbers[AT_NULLS] = -1;
    if (!check_depth(reader, depth) || !add_row(reader, &reader->columns, COLUMN_NUMBERS, &row))
        return 0;
    while (next_field(reader, &field)) {
        int ok;
        switch (field.id) {
        case 1:
            ok = read_length(reader, &field, &length);
            break;
        case 3:
            ok = open_struct(reader, &field, depth + 1)
                 && read_metadata(reader, numbers, depth + 1);
            numbers[AT_FLAGS] |= METADATA;
            break;
        case 8:
            ok = is_new(reader, &field) && skip_field(reader, &field, depth);
            numbers[AT_FLAGS] |= ENCRYPTED;
            break;
        default:
            ok = skip_field(reader, &field, depth);
        }
        if (!ok)
            return 0;
    }
    if (length)
        numbers[AT_FLAGS] |= OTHER_FILE;
    put_row(row, numbers, COLUMN_NUMBERS);
    return !reader->fault;
}

/* A list of structs, each read by `each`; `*found` is how many. */
static int read_structs(struct reader *reader, struct field *field, int depth,
                        int (*each)(struct reader *, int), int64_t *found)
{
    uint64_t count;
    int kind;
    if (!is_new(reader, field))
        return 0;
    if (field->kind != LIST && field->kind != SET)
        return refuse(reader, OTHER_TYPE, field->id);
    if (!open_list(reader, depth, &count, &kind))
        return 0;
    if (count && kind != STRUCT)
        return refuse(reader, OTHER_TYPE, field->id);
    *found = (int64_t)count;
    for (; count > 0; count--)
        if (!each(reader, depth + 2)) /* the list is one level, the struct another */
            return 0;
    return 1;
}

static int read_group(struct reader *reader, int depth)
{
    int64_t numbers[GROUP_NUMBERS] = {0}, *row;
    struct field field = {0};
    if (!check_depth(reader, depth) || !add_row(reader, &reader->groups, GROUP_NUMBERS, &row))
        return 0;
    while (next_field(reader, &field)) {
        int ok;
        if (field.id == 1)
            ok = read_structs(reader, &field, depth, read_column, numbers + 1);
        else if (field.id == 3)
            ok = read_number(reader, &field, numbers);
        else
            ok = skip_field(reader, &field, depth);
        if (!ok)
            return 0;
    }
    for (int id = 3; id > 0; id -= 2)
        if (!reader->fault && !(field.seen & (uint32_t)1 << id))
            return refuse(reader, MISSING, id);
    put_row(row, numbers, GROUP_NUMBERS);
    return !reader->fault;
}

static int read_file(struct reader *reader)
{
    struct field field = {0};
    int64_t count;
    while (next_field(reader, &field)) {
        int ok;
        switch (field.id) {
        case 2:
            ok = read_structs(reader, &field, 0, read_element, &count);
            break;
        case 3:
            ok = read_number(reader, &field, &reader->rows);
            break;
        case 4:
            ok = read_structs(reader, &field, 0, read_group, &count);
            break;
        case 8:
            ok = is_new(reader, &field) && skip_field(reader, &field, 0);
            reader->is_encrypted = 1;
            break;
        default:
            ok = skip_field(reader, &field, 0);
        }
        if (!ok)
            return 0;
    }
    for (int id = 2; id <= 4; id++)
        if (!reader->fault && !(field.seen & (uint32_t)1 << id))
            return refuse(reader, MISSING, id);
    return !reader->fault;
}

int64_t read_parquet_facts(const uint8_t *content, int64_t length, int64_t *const *tables,
                           int64_t *counts)
{
    struct reader reader = {.begin = content, .at = content, .end = content + length};
    struct table *const own[] = {&reader.elements, &reader.groups, &reader.columns,
                                 &reader.levels};
    for (int i = 0; tables && i < 4; i++) {
        own[i]->rows = tables[i];
        own[i]->room = counts[i];
    }
    read_file(&reader);
    for (int i = 0; i < 4; i++)
        counts[i] = own[i]->count;
    counts[4] = reader.rows;
    counts[5] = reader.is_encrypted;
    counts[6] = reader.field;
    return reader.fault;
}

/* A row group to be cut out: its rows, and where it begins. */
static int cut_group(struct reader *reader, int depth)
{
    int64_t numbers[GROUP_NUMBERS] = {0, reader->at - reader->begin}, *row;
    struct field field = {0};
    if (!check_depth(reader, depth) || !add_row(reader, &reader->groups, GROUP_NUMBERS, &row))
        return 0;
    while (next_field(reader, &field)) {
        int ok = field.id == 3 ? read_number(reader, &field, numbers)
                               : skip_field(reader, &field, depth);
        if (!ok)
            return 0;
    }
    if (!reader->fault && !(field.seen & (uint32_t)1 << 3))
        return refuse(reader, MISSING, 3);
    put_row(row, numbers, GROUP_NUMBERS);
    return !reader->fault;
}

int64_t cut_parquet_footer(const uint8_t *content, int64_t length, int64_t *groups,
                           int64_t *counts)
{
    struct reader reader = {.begin = content, .at = content, .end = content + length,
                            .groups = {.rows = groups, .room = counts[0]}};
    struct field field = {0};
    int ok = 1;
    while (ok && next_field(&reader, &field)) {
        if (field.id == 4) {
            int64_t count;
            counts[1] = reader.at - content;
            ok = read_structs(&reader, &field, 0, cut_group, &count);
            counts[2] = reader.at - content;
        } else {
            ok = skip_field(&reader, &field, 0);
        }
    }
    if (!reader.fault && !(field.seen & (uint32_t)1 << 4))
        refuse(&reader, MISSING, 4);
    counts[0] = reader.groups.count;
    counts[3] = reader.field;
    return reader.fault;
}

uint32_t parquet_facts_source_crc(void)
{
    return SOURCE_CRC;
}
